"""Planning: which cluster to build for a workload, and whether to split it.

How a plan comes about, and where:

1. `plan_command` reads options, `problem_file` a YAML file; `plan_schema` checks their fields, `question` makes
   a `problem` of them.
2. `designs` lists the ways to serve. `lower_bounds` refuses what no simulation needs to try.
3. `search` and `capacity` yield questions, `drive` runs many of them at once, `pool` answers them in processes with
   `probe`, which simulates. `journal` keeps answers in a file.
4. `planner` sizes, varies, compares and fills a `plan`; `verdict` says whether to split,
   `sensitivity` where that changes.
5. `drift` and `days` let the best designs serve a day under autoscaling policies.
6. `plan_view` prints the plan, `documents` has it as JSON and as a cluster file, `report` draws it.
   `provision` is the whole in one call, for Python programs.

`study` runs the paper's provisioning study again with the same searches.
"""
