// Reads ranges of files in small pieces by many threads, so that one expert alone fills the queue of a disk. Python's
// threads would take its lock for each piece. reading.py says when this is used; where it fails, Python reads again and
// says what is wrong. What is read may go on to a device without Python (copy_to_device.h).
#include "copy_to_device.h"

using amoeba::Loads;
using amoeba::Onward;
using amoeba::Readers;
using amoeba::Request;
using amoeba::Target;

extern "C" {

void* amoeba_readers_begin(int threads) { return new Readers(threads); }

void amoeba_readers_end(void* readers) { delete static_cast<Readers*>(readers); }

// 0, or the number of an error; ENODATA: the file is shorter. When it returns, nobody writes to `target` any more.
int amoeba_read(void* readers, int file, int64_t offset, int64_t bytes, char* target, int64_t piece, int64_t part,
                void (*told)(int64_t begin, int64_t bytes)) {
  amoeba::Told tell;
  if (told != nullptr) {
    tell = [told](int64_t begin, int64_t size, bool is_there) {
      if (is_there) told(begin, size);
    };
  }
  Request request(file, offset, bytes, target, piece, part, tell);
  return static_cast<Readers*>(readers)->read(request);
}

void* amoeba_loads_new(void* readers, const Onward* onward) {
  return new Loads(*static_cast<Readers*>(readers), *onward);
}

void amoeba_loads_begin(void* loads, int file, int64_t offset, int64_t bytes, char* memory, int64_t piece) {
  static_cast<Loads*>(loads)->begin(file, offset, bytes, memory, piece);
}

void amoeba_loads_open(void* loads, const Target* targets, int64_t count, uint64_t place, uint32_t value) {
  static_cast<Loads*>(loads)->open(targets, count, place, value);
}

void amoeba_loads_cancel(void* loads) { static_cast<Loads*>(loads)->cancel(); }

// errors: of each read, 0 or its number. times: begun, first piece, last piece, word. The error of a copy or of the word.
int amoeba_loads_end(void* loads, int* errors, int64_t* times) {
  Loads* mine = static_cast<Loads*>(loads);
  const int code = mine->wait(errors);
  const amoeba::Times& at = mine->times;
  times[0] = at.begun, times[1] = at.first, times[2] = at.last, times[3] = at.called;
  delete mine;
  return code;
}
}
