// The products of a pass by what becomes of their sums. They are most of what the compiler has to do: each is compiled in
// one of the units node_*.cpp, at the same time as the others, and only declared here.
#pragma once
#include "epilogue.h"

namespace [[gnu::visibility("hidden")]] amoeba {

#define AMOEBA_PRODUCT(KIND, EPILOGUE) void run_job_of<KIND>(const Product&, const Job&, const Input&, const EPILOGUE&)

extern template AMOEBA_PRODUCT(Bf16, LowRankEpilogue);
extern template AMOEBA_PRODUCT(Bf16, UpEpilogue);
extern template AMOEBA_PRODUCT(Int8, UpEpilogue);
extern template AMOEBA_PRODUCT(Bf16, RowsEpilogue<float>);
extern template AMOEBA_PRODUCT(Int8, RowsEpilogue<float>);
extern template AMOEBA_PRODUCT(Bf16, RowsEpilogue<uint16_t>);
extern template AMOEBA_PRODUCT(Int8, RowsEpilogue<uint16_t>);
extern template AMOEBA_PRODUCT(Bf16, DownEpilogue);
extern template AMOEBA_PRODUCT(Int8, DownEpilogue);

}  // namespace amoeba
