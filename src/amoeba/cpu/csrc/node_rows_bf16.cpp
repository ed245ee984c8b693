#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Bf16, LowRankEpilogue);
template AMOEBA_PRODUCT(Bf16, RowsEpilogue<float>);
template AMOEBA_PRODUCT(Bf16, RowsEpilogue<uint16_t>);
}  // namespace amoeba
