#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Int8, RowsEpilogue<float>);
template AMOEBA_PRODUCT(Int8, RowsEpilogue<uint16_t>);
}  // namespace amoeba
