// dlopen, and where to look.
#include "util/dynlib.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

namespace turnout::util {

namespace {

namespace fs = std::filesystem;

fs::path own_path() {
  static const char here = 0;
  Dl_info info{};
  link_map* map = nullptr;
  if (dladdr1(&here, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || !map) return {};
  std::error_code error;
  // The program itself has no name in the loader's list, and its argv[0] may be anything.
  const fs::path object = *map->l_name ? fs::absolute(map->l_name, error) : fs::read_symlink("/proc/self/exe", error);
  return error ? fs::path() : object;
}

std::vector<fs::path> places(const std::string& file) {
  const fs::path folder = own_path().parent_path();
  if (folder.empty()) return {};
  std::vector<fs::path> all;
  for (const fs::path& place : {folder / file, folder / ".." / TURNOUT_LIBDIR / file, folder / ".." / "lib" / file}) {
    std::error_code error;
    const fs::path plain = fs::weakly_canonical(place.parent_path(), error) / file;
    if (!error && std::find(all.begin(), all.end(), plain) == all.end()) all.push_back(plain);
  }
  return all;
}

}  // namespace

std::string own_file() { return own_path().string(); }

Dynlib::Dynlib(const std::string& file, const std::string& path) {
  std::string tried;
  const auto load = [&](const std::string& name) {
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle_) path_ = name;
    else if (const char* words = dlerror()) tried += (tried.empty() ? "" : "; ") + std::string(words);
    return handle_ != nullptr;
  };
  if (!path.empty()) {
    if (load(path)) return;
    throw TransportError("cannot load " + path + ": " + tried);
  }
  for (const fs::path& place : places(file)) {
    std::error_code error;
    if (fs::exists(place, error)) {
      if (load(place.string())) return;
    } else {
      tried += (tried.empty() ? "" : "; ") + ("not at " + place.string());
    }
  }
  if (load(file)) return;
  throw TransportError("cannot load " + file + ": " + tried);
}

void* Dynlib::symbol(const char* name) const { return dlsym(handle_, name); }

}  // namespace turnout::util
