#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Bf16, FinishLow);
template AMOEBA_PRODUCT(Bf16, FinishRows<float>);
template AMOEBA_PRODUCT(Bf16, FinishRows<uint16_t>);
}  // namespace amoeba
