"""Share one database among replicas: who leads, and which rows changed."""
