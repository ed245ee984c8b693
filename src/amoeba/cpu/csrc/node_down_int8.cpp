#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Int8, DownEpilogue);
}  // namespace amoeba
