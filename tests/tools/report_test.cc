#include "tools/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace turnout::tools {
namespace {

Report example() {
  Report report = new_report("turnout bench");
  ReportCase c;
  c.op = "dispatch";
  c.p50_us = 140;
  c.limit_us = 100;
  report.cases.push_back(c);
  return report;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  EXPECT_NE(text.find(from), std::string::npos) << from;
  return text.replace(text.find(from), from.size(), to);
}

TEST(Report, WhatIsWrittenIsOfTheSchema) {
  EXPECT_EQ(report_problems(to_json(example())), std::vector<std::string>{});
  EXPECT_NE(to_json(example()).find("\"schema\": 1"), std::string::npos);
  Report gpu = example();
  gpu.host.gpu = "2 x GPU";
  EXPECT_EQ(report_problems(to_json(gpu)), std::vector<std::string>{});
  EXPECT_EQ(report_problems(replaced(to_json(gpu), "\"2 x GPU\"", "2")), std::vector<std::string>{"host.gpu is a number, not a string"});
}

TEST(Report, RecordsAreOfTheSchemaAndSayOfWhatTree) {
  int num_records = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TURNOUT_RECORDS)) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream file(entry.path());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(report_problems(text), std::vector<std::string>{}) << entry.path();
    EXPECT_EQ(text.find("\"tree\": \"\""), std::string::npos) << entry.path();
    ++num_records;
  }
  EXPECT_GT(num_records, 0);
}

TEST(Report, DepartureFromTheSchemaIsNamed) {
  const std::string good = to_json(example());
  EXPECT_EQ(report_problems("[]"), std::vector<std::string>{"it is not a JSON object"});
  EXPECT_EQ(report_problems("{nonsense"), std::vector<std::string>{"it is not a JSON object"});
  EXPECT_EQ(report_problems(replaced(good, "\"schema\": 1", "\"schema\": 2")), std::vector<std::string>{"schema is not 1"});
  EXPECT_EQ(report_problems(replaced(good, "\"p50_us\": 140.0", "\"p50_us\": \"fast\"")),
            std::vector<std::string>{"cases[0].p50_us is a string, not a number or null"});
  EXPECT_EQ(report_problems(replaced(good, "\"op\": \"dispatch\"", "\"op\": 1")), std::vector<std::string>{"cases[0].op is a number, not a string"});
  EXPECT_EQ(report_problems(replaced(good, "\"top_k\"", "\"topk\"")),
            (std::vector<std::string>{"cases[0].top_k is missing", "cases[0].topk is unknown"}));
}

TEST(Report, HostIsDescribed) {
  const ReportHost host = describe_host();
  EXPECT_GT(host.cores, 0);
  EXPECT_GT(host.memory_gib, 0);
  EXPECT_FALSE(host.kernel.empty());
}

TEST(Report, RatioNeedsALimit) {
  ReportCase c = example().cases[0];
  EXPECT_DOUBLE_EQ(c.ratio().value(), 1.4);
  c.limit_us.reset();
  EXPECT_FALSE(c.ratio());
}

TEST(Report, QuantilesAreMeasuredValues) {
  const std::vector<double> values{5, 1, 4, 2, 3};
  EXPECT_EQ(quantile(values, 0), 1);
  EXPECT_EQ(quantile(values, 0.5), 3);
  EXPECT_EQ(quantile(values, 0.99), 5);
  EXPECT_EQ(quantile({7}, 0.5), 7);
}

TEST(Report, AFileThatCannotBeWrittenIsAnError) { EXPECT_ANY_THROW(write_report(example(), "/does/not/exist/report.json")); }

}  // namespace
}  // namespace turnout::tools
