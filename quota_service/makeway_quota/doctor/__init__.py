"""Find out what will not work on a cluster or a machine as it is, and what to do: `makeway-quota doctor`."""
