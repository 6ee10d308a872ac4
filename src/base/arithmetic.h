// How much arithmetic a thread has asked for: counted where it is asked for, so that two ways to
// compute one thing can be compared without a clock.
#pragma once

namespace winnow {

// Floating-point operations, ever growing: 2 M K N of a product of matrices; of attention and
// indexers 2 per channel for every pair of a row and a key that they must look at, twice that
// backward. What kernels do beside, masked parts of their tiles and recomputed logits, is not in it.
double& counted_flops();  // of the calling thread

}  // namespace winnow
