// The command `turnout`, in this process.
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/state.h"
#include "tools/command.h"

namespace turnout::python {

namespace {

std::vector<std::string> words_of(nb::handle list) {
  std::vector<std::string> words;
  for (const nb::handle word : list) words.emplace_back(text_of(word));
  return words;
}

int run_command(nb::list program, nb::list arguments) {
  const std::vector<std::string> again = words_of(program);
  std::vector<std::string> words = words_of(arguments);
  words.insert(words.begin(), "turnout");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const nb::gil_scoped_release unlocked;
  return tools::main_of(static_cast<int>(words.size()), argv.data(), again);
}

}  // namespace

void bind_tools(nb::module_& m) {
  m.def("run_command", &run_command, nb::arg("program"), nb::arg("arguments"),
        nb::sig("def run_command(program: list[str], arguments: list[str]) -> int"),
        "Does what `turnout ARGUMENTS` does and returns its exit status. program: words that start it again, once per rank.");
}

}  // namespace turnout::python
