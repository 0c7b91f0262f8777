"""Plays scenario files, failure reports as data, against a guard on a virtual clock."""
