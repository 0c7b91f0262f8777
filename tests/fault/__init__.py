"""Fault tests: the guard on real servers while servers, workers, daemons, networks, disks and clocks fail."""
