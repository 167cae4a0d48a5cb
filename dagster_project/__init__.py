"""The top package: definitions, deployments, sensors, our own runs and the command line. No other package imports it.

Every process of the product imports this package before the other Dagster packages: the command line, a service, a code
server, and Dagster's own processes by the names in dagster.yaml.
"""

from imagemill.project import prefer_project

prefer_project()
