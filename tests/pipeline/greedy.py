"""Schedules run by the book, one task at a time: the reference for validation and simulation."""

from tfpar.pipeline.tasks import Task


def needed(task, present, num_stages):
    """What a task of a chain of stages needs, in the schedule's kinds."""

    def backward(stage):
        return next(t for k in "BI" if (t := Task(k, stage, task.micro)) in present)

    if task.kind == "F":
        return [Task("F", task.stage - 1, task.micro)] if task.stage else []
    if task.kind == "W":
        return [Task("I", task.stage, task.micro)]
    last = task.stage == num_stages - 1
    return [Task("F", task.stage, task.micro), *([] if last else [backward(task.stage + 1)])]


def ends(orders, num_stages, seconds=lambda task: 1, sent=lambda before, after: 0):
    """When each task of a chain ends, or None if some never do.

    A longest path: a task begins once its actor is free and what it needs is there.
    """
    present = {task for order in orders for task in order}
    home = {task: actor for actor, order in enumerate(orders) for task in order}
    found, at, free = {}, [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for actor, order in enumerate(orders):
            while at[actor] < len(order):
                task = order[at[actor]]
                before = needed(task, present, num_stages)
                if any(t not in found for t in before):
                    break
                there = [found[t] + (sent(t, task) if home[t] != actor else 0) for t in before]
                found[task] = free[actor] = max([free[actor], *there]) + seconds(task)
                at[actor] += 1
                moved = True
    return found if len(found) == len(present) else None


def most_kept(order):
    """The most microbatches that an actor keeps at once, counted once for each of its stages."""
    kept = most = 0
    for task in order:
        kept += (task.kind == "F") - (task.kind in "BW")
        most = max(most, kept)
    return most
