// The program `turnout`.
#include "tools/command.h"

int main(int argc, char** argv) { return turnout::tools::main_of(argc, argv); }
