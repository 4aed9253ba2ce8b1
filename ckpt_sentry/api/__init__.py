"""
What programs may ask for themselves: `precheck`, `audit`, `LoadAuditor`, `DCPErrorAggregator`.
"""
