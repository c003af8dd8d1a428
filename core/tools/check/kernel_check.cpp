// Compares every kernel of every level that this machine can run with a plain double-precision reference, and all
// levels with the generic one bit for bit.  Prints differences; the exit status is 1 if there are any. `--part`: fewer
// rows per shape.
#include "base/cpu.h"
#include "kernel_check.h"
#include "kernel_check_attention.h"
#include "kernel_check_linear.h"
#include "kernel_check_rows.h"
#include "kernel_check_tiles.h"

namespace check {

inline float widened(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Bf16 dot products with other orders or roundings, which other processors may have.
enum Order { ODD_FIRST, EVEN_FIRST, ONE_ROUNDING };
template <Order order>
void dot(const uint16_t* a, const uint16_t* b, float* acc) {
  for (int i = 0; i < 16; ++i) {
    const float a0 = widened(a[2 * i]), a1 = widened(a[2 * i + 1]), b0 = widened(b[2 * i]), b1 = widened(b[2 * i + 1]);
    if (order == ODD_FIRST) acc[i] = std::fmaf(a0, b0, std::fmaf(a1, b1, acc[i]));
    if (order == EVEN_FIRST) acc[i] = std::fmaf(a1, b1, std::fmaf(a0, b0, acc[i]));
    if (order == ONE_ROUNDING) acc[i] = float(double(a1) * double(b1) + double(a0) * double(b0) + double(acc[i]));
  }
}

// A processor with such dot products must not get kernels that rely on ours.
inline void check_order() {
  if (!ps::dots_in_order(dot<ODD_FIRST>)) fail("dots_in_order", "any", "refused odd first");
  if (ps::dots_in_order(dot<EVEN_FIRST>)) fail("dots_in_order", "any", "took even first");
  if (ps::dots_in_order(dot<ONE_ROUNDING>)) fail("dots_in_order", "any", "took one rounding for two");
}

}  // namespace check

int main(int argc, char** argv) {
  check::whole = argc < 2 || std::strcmp(argv[1], "--part") != 0;
  check::check_order();
  std::string names;
  for (const ps::Kernels* k : check::levels()) names += std::string(" ") + k->level;
  std::printf("levels:%s\n", names.c_str());
  check::check_weights();
  check::check_linear();
  check::check_tiles();
  check::check_rows();
  check::check_attention();
  std::printf("%d failures\n", check::failures);
  return check::failures ? 1 : 0;
}
