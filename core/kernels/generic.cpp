// The level that runs everywhere: plain C++.
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "penstock.h"

#define PS_GENERIC
#include "lanes_generic.h"
#include "table.h"

namespace ps {
const Kernels* const kernels_generic = &table;
}
