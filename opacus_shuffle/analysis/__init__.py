"""Mathematics on floats and arrays, one topic per file, without PyTorch.

Long proofs are in docs/proofs/.

======================  ==========================================================================
gaussian                the Gaussian mechanism without any shuffler
mean_ratio              Rényi moments of the papers' pair: the mean ratio R of shuffled reports
subsampling             the paper's bounds for sampled rounds; composition converts RDP to (ε, δ)
ratio_distribution      distributions above and below that of R
opposite_reports        the same for a record that becomes its opposite
discretization          distributions on grids, which both use
privacy_loss            composes such distributions over rounds
shuffled_rounds         ε of rounds: the pair's, without the shuffler, and DP-SGD's
gaussian_clones         ε proved for every data set: reports that look alike hide each other
merge                   replaces many different rounds by a few
fenton_wilkinson        the estimate for weight shuffling
advanced_composition    composes its steps as that paper does
permuted_gaussian       the exact value of a pair under weight shuffling
binomial_sums           sums under binomial noise; sampled_sums adds secret samples of fixed size
======================  ==========================================================================

>>> from opacus_shuffle.analysis import mean_ratio
>>> round(mean_ratio.compute_rdp(noise_multiplier=1.0, num_users=1, orders=4), 12)
2.0
"""
