// Compares every kernel of every level that this machine can run with a plain double-precision reference, and all
// levels with the generic one bit for bit.  Prints what differs; the exit status is 1 if anything does.
#include "kernel_check.h"
#include "kernel_check_attention.h"
#include "kernel_check_linear.h"
#include "kernel_check_rows.h"

int main() {
  std::string names;
  for (const ps::Kernels* k : check::levels()) names += std::string(" ") + k->level;
  std::printf("levels:%s\n", names.c_str());
  check::check_weights();
  check::check_linear();
  check::check_rows();
  check::check_attention();
  std::printf("%d failures\n", check::failures);
  return check::failures ? 1 : 0;
}
