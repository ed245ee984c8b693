#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Int8, FinishRows<float>);
template AMOEBA_PRODUCT(Int8, FinishRows<uint16_t>);
}  // namespace amoeba
