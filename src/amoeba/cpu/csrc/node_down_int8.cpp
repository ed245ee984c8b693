#include "node_products.h"

namespace amoeba {
template AMOEBA_PRODUCT(Int8, FinishDown);
}  // namespace amoeba
