// Prints docs/env.md; `./dev docs` puts it there.
#include <cstdio>

#include "util/env.h"

int main() {
  const std::string page = turnout::util::env_page();
  return std::fwrite(page.data(), 1, page.size(), stdout) == page.size() ? 0 : 1;
}
