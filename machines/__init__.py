"""Machines that come with logyard. A machine sees metadata and payload names, never payload bytes."""
