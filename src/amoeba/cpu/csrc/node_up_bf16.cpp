#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Bf16, UpEpilogue);
}  // namespace amoeba
