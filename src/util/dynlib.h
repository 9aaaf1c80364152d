// Shared objects loaded when first needed, so that one package serves machines with and without what they drive.
#pragma once
#include <string>

#include "turnout/error.h"

namespace turnout::util {

/// The library or program that this code was linked into; empty if unknown.
std::string own_file();

/// A shared object, loaded for good: code that has registered itself with a driver is never unloaded.
class Dynlib {
 public:
  /// Loads `path` if it is not empty. Else looks for `file` beside the object that holds this code, in the library folder of its
  /// package (for a command in bin/), and wherever the system's loader looks.
  /// Throws: TransportError with every place and the loader's words.
  explicit Dynlib(const std::string& file, const std::string& path = "");

  /// Null if the object shows no such name.
  void* symbol(const char* name) const;
  const std::string& path() const { return path_; }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace turnout::util
