// Proves the tests of the oracle: each runs against an oracle with one mistake in it, and must fail.
// Every test of the suites "Reference*" is in the table, and every mutation.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <string>

#include "core/mutation.h"

namespace {

using turnout::core::Mutation;

struct Proof {
  const char* test;
  Mutation mutation;
};

constexpr Proof kProofs[] = {
    {"ReferenceDispatch.RankMajorHasOneRowPerTokenAndRank", Mutation::row_per_expert},
    {"ReferenceDispatch.RankMajorWeightsAreZeroWhereNotLocal", Mutation::foreign_weights_stay},
    {"ReferenceDispatch.SideArraysTravelWithTheRows", Mutation::side_of_first_token},
    {"ReferenceDispatch.ExpertMajorGroupsBySourceTokenK", Mutation::k_before_token},
    {"ReferenceDispatch.ExpertRowsHaveTheirOwnWeight", Mutation::weight_of_first_k},
    {"ReferenceDispatch.GroupsStartAtMultiplesAndPaddingIsZero", Mutation::groups_are_not_aligned},
    {"ReferenceDispatch.DuplicatesCountTwice", Mutation::duplicates_count_once},
    {"ReferenceDispatch.MinusOneGoesNowhereAndZeroTokensAreNone", Mutation::minus_one_is_expert_0},
    {"ReferenceDispatch.LocalNumbersArePositionsAmongTheIdsOfTheRank", Mutation::local_number_is_global_id},
    {"ReferenceDispatch.RankMajorCapacityAdmitsTheFirstRows", Mutation::admits_one_more},
    {"ReferenceDispatch.RankMajorDropsAreTokenRows", Mutation::dropped_counts_pairs},
    {"ReferenceDispatch.BeyondTheRowsThereAreNoExpertsAndNoWeights", Mutation::rest_is_expert_0},
    {"ReferenceDispatch.ExpertMajorCapacityCountsPadding", Mutation::padding_is_free},
    {"ReferenceDispatch.ExpertMajorEndsAtTheFirstThatDoesNotFit", Mutation::later_rows_may_fit},
    {"ReferenceDispatch.SlabHasACapacityPerExpert", Mutation::slab_shares_its_capacity},
    {"ReferenceDispatch.RowsAreInTheOrderOfSourcesAndTokens", Mutation::tokens_in_descending_order},
    {"ReferenceDispatch.QuantisesBlocksAndTheShortLastOne", Mutation::short_block_is_skipped},
    {"ReferenceDispatch.QuantisesWithPowersOfTwo", Mutation::exponent_is_one_up},
    {"ReferenceDispatch.RefusesWhatIsNoExpertAndASlabWithoutCapacity", Mutation::unknown_id_is_accepted},
    {"ReferenceCombine.AddsTheRowsOfEachToken", Mutation::last_row_is_forgotten},
    {"ReferenceCombine.ExpertsOfARankAreAddedInKOrder", Mutation::k_in_descending_order},
    {"ReferenceCombine.RanksAreAddedInAscendingOrder", Mutation::ranks_in_descending_order},
    {"ReferenceCombine.NodesAreAddedAfterTheirRanks", Mutation::nodes_are_ignored},
    {"ReferenceCombine.EachRankPartialIsRoundedToTheWireItsOwnToo", Mutation::own_partial_is_not_rounded},
    {"ReferenceCombine.EachNodePartialIsRoundedToTheWire", Mutation::node_partial_is_not_rounded},
    {"ReferenceCombine.ASumStartsAtItsFirstTerm", Mutation::sum_starts_at_zero},
    {"ReferenceCombine.RowsOnTheWireAreAddedInKOrderOverAllRanks", Mutation::rows_by_rank},
    {"ReferenceCombine.Fp8WireHasAScalePerBlock", Mutation::wire_is_payload},
    {"ReferenceCombine.SourceWeightsAreAppliedBeforeAnyRounding", Mutation::partial_is_rounded_before_weights},
    {"ReferenceCombine.RowWeightsComeWithTheRows", Mutation::weights_are_ignored},
    {"ReferenceCombine.TokenWeightsAreThoseOfTheSource", Mutation::weights_are_ignored},
    {"ReferenceCombine.Float64IsAddedInFloat64", Mutation::double_sums_in_float},
    {"ReferenceCombine.NaNIsCanonical", Mutation::nan_has_a_sign},
    {"ReferenceCombine.SideScalarsGoBackToTheirChoice", Mutation::side_to_first_k},
    {"ReferenceCombine.DroppedTermsAreLeftOutAndCounted", Mutation::lost_counts_rows},
    {"ReferenceCombine.DroppedExpertRowsAreCountedOneByOne", Mutation::lost_counts_rows},
    {"ReferenceCombine.RowsThatAreNotRealAreNeverRead", Mutation::padding_is_read},
    {"ReferenceCombine.RefusesWhatHasNoMeaning", Mutation::sums_cross_as_rows},
    {"ReferenceProperty.EveryChoiceIsARowOrDropped", Mutation::duplicates_count_once},
    {"ReferenceProperty.SlotsAreWhereTheyAreComputed", Mutation::tokens_in_descending_order},
    {"ReferenceProperty.AdmissionIsThatOfTheSlots", Mutation::later_rows_may_fit},
    {"ReferenceProperty.SortedRowsListEachRowOncePerLocalChoice", Mutation::sorted_rows_by_row},
    {"ReferenceProperty.RowsAreThoseThatTheirSourceSent", Mutation::side_of_first_token},
    {"ReferenceProperty.CombineOfOnesCountsTheRowsAndLosesTheRest", Mutation::padding_is_read},
    {"ReferenceProperty.CombineIsNearTheSumInDouble", Mutation::weights_are_ignored},
    {"ReferenceProperty.RowsOnTheWireDoNotDependOnRanksOrNodes", Mutation::rows_by_rank},
};

/// Runs one test in a child, its output thrown away.
bool passes(const char* test, Mutation mutation) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) _exit(2);
    turnout::core::active_mutation = mutation;
    ::testing::GTEST_FLAG(filter) = test;
    const int result = RUN_ALL_TESTS();
    _exit(::testing::UnitTest::GetInstance()->test_to_run_count() == 1 ? result : 2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  // Runs that must fail are no results of their own: this program counts as one test.
  ::testing::GTEST_FLAG(output) = "";
  ::testing::InitGoogleTest(&argc, argv);
  int failures = 0;
  auto complain = [&](const std::string& what) {
    std::printf("FAILED: %s\n", what.c_str());
    ++failures;
  };
  std::set<std::string> proven;
  std::set<Mutation> used;
  for (const Proof& proof : kProofs) {
    proven.insert(proof.test);
    used.insert(proof.mutation);
    if (!passes(proof.test, Mutation::none)) complain(std::string(proof.test) + " fails without a mutation");
    if (passes(proof.test, proof.mutation))
      complain(std::string(proof.test) + " does not notice mutation " + std::to_string(static_cast<int>(proof.mutation)));
  }
  for (int m = 1; m < static_cast<int>(Mutation::last); ++m) {
    if (!used.count(static_cast<Mutation>(m))) complain("no test is said to notice mutation " + std::to_string(m));
  }
  const auto& tests = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < tests.total_test_suite_count(); ++s) {
    for (int t = 0; t < tests.GetTestSuite(s)->total_test_count(); ++t) {
      const std::string name = std::string(tests.GetTestSuite(s)->name()) + "." + tests.GetTestSuite(s)->GetTestInfo(t)->name();
      if (!proven.count(name)) complain(name + " has no mutation");
    }
  }
  std::printf("%zu tests, %zu mutations, %d failures\n", proven.size(), used.size(), failures);
  return failures ? 1 : 0;
}
