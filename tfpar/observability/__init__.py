"""Observability of plans and training: reports, timelines, monitoring, verification.

* `observability.report` explains a plan: summaries, tables, comparisons and a page of HTML, all
  views of one `Report`.
* `observability.timeline` records steps, or draws the predicted ones, as traces for Perfetto.
* `observability.monitor` compares measured steps with the plan's prediction (`tap.Monitor`), and
  replans where they differ.
* `observability.verification` compares a parallel model with the same on one device
  (`tap.verify`).
"""
