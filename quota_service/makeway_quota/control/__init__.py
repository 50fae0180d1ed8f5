"""The control loop: observe, reconcile, plan, apply, actuate."""
