"""The steps of the admission cycle, each of which reads the rules and records decisions in the plan."""
