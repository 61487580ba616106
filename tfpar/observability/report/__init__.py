"""Reports of plans: their data, and views as text, tables, a graph and a page of HTML."""
