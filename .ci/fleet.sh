# Sourced by .ci/run: a real Collector, Jaeger and Prometheus for tests/fleet, whose tests then must not skip.
#
# Binaries lie packed beside the repository, in ../shared/collector, and are unpacked once into .ci/bin (ignored).
# shellcheck shell=bash

fleet_root=$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)
fleet_bin=$fleet_root/.ci/bin
fleet_packed=$fleet_root/../shared/collector
mkdir -p "$fleet_bin"

fleet_unpack() {  # NAME PATTERN
    local packed
    packed=$(find "$fleet_packed" -maxdepth 1 -name "$2" 2>/dev/null | sort | tail -n 1)
    if [[ -n $packed && ! -x $fleet_bin/$1 ]]; then
        xz -dc "$packed" >"$fleet_bin/$1.part"
        chmod +x "$fleet_bin/$1.part"
        mv "$fleet_bin/$1.part" "$fleet_bin/$1"
    fi
}

echo "== Collector, Jaeger, Prometheus"
fleet_unpack otelcol 'otelcol-*.xz'
fleet_unpack jaeger 'jaeger-*.xz'
[[ ! -x $fleet_bin/otelcol ]] || export CKPT_SENTRY_OTELCOL=$fleet_bin/otelcol
[[ ! -x $fleet_bin/jaeger ]] || export CKPT_SENTRY_JAEGER=$fleet_bin/jaeger

fleet_packages=()
command -v promtool >/dev/null || fleet_packages+=(prometheus)
command -v mpirun >/dev/null || fleet_packages+=(openmpi-bin)
command -v ip >/dev/null || fleet_packages+=(iproute2)
if ((${#fleet_packages[@]})); then
    fleet_sudo=()
    [[ $(id -u) == 0 ]] || fleet_sudo=(sudo -n)
    "${fleet_sudo[@]}" apt-get update -qq &&
        "${fleet_sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            "${fleet_packages[@]}" >/dev/null || echo "could not be installed: ${fleet_packages[*]}" >&2
fi

# What is missing by now fails its tests instead of skipping them.
export NO_SKIP=1
