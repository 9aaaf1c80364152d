// Prints docs/env.md; with a file's name, says whether that file is the page.
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "util/env.h"

int main(int argc, char** argv) {
  const std::string page = turnout::util::env_page();
  if (argc < 2) return std::fputs(page.c_str(), stdout) < 0 ? 1 : 0;
  std::ifstream file(argv[1]);
  std::stringstream text;
  text << file.rdbuf();
  if (text.str() == page) return 0;
  std::fprintf(stderr, "%s differs from the table of variables; `./dev docs` prints it anew. It should be:\n%s", argv[1], page.c_str());
  return 1;
}
