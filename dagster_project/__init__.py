"""The front door: definitions, deployments, sensors, our own runs and the command line. Nothing imports it.

Every process of the product imports this package before its neighbours: the command line, a service, a code server, and Dagster's
own processes by the names in dagster.yaml.
"""

from imagemill.project import prefer_project

prefer_project()
