"""Run several replicas on one database: which one decides, and how the others see what it committed."""
