"""Machines of deployments: what drives them while this replica leads, and how their agents reach the service.

`machine_loop` makes the steps that `autoscale` decides, with a `deployment_driver` for each deployment and what cycles
of the control loop know of the work (`cycle_demand`). `channel`, `placements` and `tokens` are for the agents.
"""
