// What a test says of errors: that one of a type came, and what its words are.
#pragma once
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace turnout::support {

/// The message of the error of type `E` that `body` throws; a failure if it throws nothing or something else.
template <class E>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another error: " << e.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline void expect_says(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" is not in: " << message;
}

}  // namespace turnout::support
