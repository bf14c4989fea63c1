// What generated C++ kernels stand on. Everything is header-only and inline, written as scalar code
// without branches where a loop over it should vectorise. No torch headers and almost no std
// headers: a kernel has to compile in a fraction of a second.
//
// Conventions: a kernel keeps `int tw_bad = 0;` and passes it to helpers that can meet bad data;
// they OR an error code into it and return something harmless instead of trapping. A bool tensor is
// `uint8_t*` holding 0 or 1: loops that load or store C++ bool often do not vectorise (g++ 12).
#pragma once

#include <features.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

#define TW_INLINE inline __attribute__((always_inline))

namespace tw {
constexpr int BAD_INDEX = 1;        // an index was out of range
constexpr int BAD_ZERO_DIVISION = 2;  // an integer was divided by zero
}  // namespace tw

#include "tw_cast.h"

#include "tw_arith.h"

#include "tw_math.h"

#include "tw_random.h"

#include "tw_reduce.h"

#include "tw_loops.h"

// Long, and few kernels need it: the builder defines this for sources that name one of its
// functions.
#ifdef TW_SPECIAL
#include "tw_special.h"
#endif
