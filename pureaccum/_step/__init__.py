"""A whole optimizer step as one pure function, eager or compiled.

A step sums the gradients of the scaled loss over the microbatches of a window, divides them once,
and applies them if they are finite. Compiled, it does the same in graphs; over several ranks, sums
are added up before they are divided. The files follow each other:

    loss_scale, buffers             what may be configured
    state                           what a step takes and gives
    plans                           what it is made of, with the checks of what it is given
    microbatch_loss                 the loss of one microbatch, as a step calls it
    ranks                           what ranks tell each other
    structure                       what a structure decides, once for each
    windows, whole_step             the step: over a stream, and over a batch at hand
    next_state                      what follows from sums
    constants, recipes, scan,       the same in graphs: numbers, forms, one loop, and all that is
    graphs, compiled                compiled
    step                            ``make_step``, which puts it together
    memory_report                   what a step holds in memory
    taken_over                      going on with a run of torch's, and back
"""
