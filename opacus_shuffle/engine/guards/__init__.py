"""The checks that refuse a network, a pass or a step for which no ε would hold.

==================================  ===================================  ==========================
when                                what is checked                      function
==================================  ===================================  ==========================
``make_private``                    the arguments                        ``check_arguments``
``make_private``                    layers that Opacus supports          ``check_supported``
``make_private``                    an earlier run of the same network   ``check_earlier_runs``
``make_private``, and again if a    per-sample gradients: no record      ``TrainingCheck``
module's mode or flags change       affects those of another
``make_private``                    padding, ``collate_fn``              ``check_loader``
``make_private``                    the criterion                        ``check_denominators``,
                                                                         ``check_criterion_on``
each forward pass                   inputs of the latest batch;          ``FreshInputs``,
                                    no parameters were added, renamed    ``check_names``,
                                    or thawed since ``make_private``     ``check_hooked``
each backward pass                  no gradients of two batches; one     ``check_second_pass``,
                                    forward pass for each backward pass  ``explain_missing_calls``
each step of any optimizer          released gradients only, inside and  ``raw_gradients``
                                    outside of the private network
each step of the private optimizer  one whole, fresh batch               ``TicketBook.check``
copy and pickle                     no gradients of records are copied   ``exclude_records``
==================================  ===================================  ==========================

Each function raises a ``ValueError`` whose message names the cause and the remedy.
"""
