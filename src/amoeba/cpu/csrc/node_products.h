// The products of a pass by what becomes of their sums. They are most of what the compiler has to do: each is compiled in
// one of the units node_*.cpp, at the same time as the others, and only declared here.
#pragma once
#include "finish.h"

namespace [[gnu::visibility("hidden")]] amoeba {

#define AMOEBA_PRODUCT(KIND, FINISH) void run_job_of<KIND>(const Product&, const Job&, const Input&, const FINISH&)

extern template AMOEBA_PRODUCT(Bf16, FinishLow);
extern template AMOEBA_PRODUCT(Bf16, FinishUp);
extern template AMOEBA_PRODUCT(Int8, FinishUp);
extern template AMOEBA_PRODUCT(Bf16, FinishRows<float>);
extern template AMOEBA_PRODUCT(Int8, FinishRows<float>);
extern template AMOEBA_PRODUCT(Bf16, FinishRows<uint16_t>);
extern template AMOEBA_PRODUCT(Int8, FinishRows<uint16_t>);
extern template AMOEBA_PRODUCT(Bf16, FinishDown);
extern template AMOEBA_PRODUCT(Int8, FinishDown);

}  // namespace amoeba
