// What can be made wrong in the protocol of calls (mutation.h); tests/engine/schedule.cc proves that each is noticed.
#pragma once

namespace turnout::engine {

enum class Mutation {
  none,
  header_before_copy_is_free,  ///< a header is written while its reader may still be in the call that used the copy before
  header_raised_before_written,
  rows_raised_before_written,  ///< of a dispatch, in place
  records_raised_before_written,
  sums_raised_before_written,  ///< of a combine
  space_before_laid_out,       ///< slots of a ring are given back while their records are still read
  one_record_too_many,         ///< in a ring
  rows_freed_while_pulled,     ///< a combine ends while its peers still read its rows in place
  old_counts_are_taken,        ///< of the call that used the copy before
  last,
};

}  // namespace turnout::engine
