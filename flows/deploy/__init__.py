"""Deployments, work pools, automations and schedules."""
