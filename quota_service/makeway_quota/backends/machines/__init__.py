"""Run jobs on machines of autoscaled pools, whose agents start the launchers that they are ordered to."""
