#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Int8, UpEpilogue);
}  // namespace amoeba
