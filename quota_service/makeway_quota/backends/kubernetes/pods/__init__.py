"""Make the objects of jobs: pods, volumes, networks of gangs, Secrets."""
