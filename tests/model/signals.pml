/* The protocol of calls on a lane (src/engine/cpu/call.h): headers, offers, rows, consumed, leases. Three ranks, two
   outstanding calls, two blocks each, four epochs: enough for every staging copy to be used again.

   Memory is written and read in separate steps of different ranks, so anything that is not ordered by a signal happens
   in both orders. A write and the signal that publishes it are one step: nobody may look before the signal, and that
   nobody still looks at what is overwritten is asserted at the write itself.

   Copies: epoch e of a lane uses copy e % DEPTH. Signals of a copy, one writer each, carry the epoch:
     header >= e   the header of e is in the copy, with the block that its reader may write (0: none, use staging)
     rows   >= e   the rows of e are in the offered block or in the staging copy
     done   >= e   the reader has finished e: header, staging and signals of the copy may be used again
   -DUSER=  what the user of rank 0 does: 0 wait in order and release at once, as the others; 1 wait in any order and
            release whenever he likes; 2 wait in any order for results in memory of his own, so that rows use staging
   -DORDERED=1 checks the variant with one consumed signal per pair that rises in order of epochs.

   -DMUTATE=  1 no look at done before a copy is reused       2 as many copies as outstanding calls, not one more
              3 a block is offered before it was released     4 rows is raised before the rows are written */
#ifndef MUTATE
#define MUTATE 0
#endif
#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef USER
#define USER 1
#endif
#define FREE(rank) (USER && (rank) == 0)
#define KEEPS(rank) (USER == 1 && (rank) == 0)
#define OWN_MEMORY(rank) (USER == 2 && (rank) == 0)
#define R 3
#define EPOCHS 4
#define OUT 2
#define BLOCKS 2
#if MUTATE == 2
#define DEPTH OUT
#else
#define DEPTH (OUT + 1)
#endif

#define COPY(at, from, e) (((at) * R + (from)) * DEPTH + (e) % DEPTH)
#define PAIR(at, from) ((at) * R + (from))
#define BLOCK(at, b) ((at) * BLOCKS + (b) - 1)
#define PART(at, b, from) (BLOCK(at, b) * R + (from))
#define HAS(mask, e) (((mask) >> (e)) & 1)
#define ADD(mask, e) mask = mask | (1 << (e))

/* Memory and signals of rank `at`, written by rank `from`. A cell holds the epoch that wrote it. */
byte header[R * R * DEPTH], offer[R * R * DEPTH], staging[R * R * DEPTH];
byte header_signal[R * R * DEPTH], rows_signal[R * R * DEPTH], done_signal[R * R * DEPTH];
byte consumed[R * R];               /* ORDERED */
byte block[R * BLOCKS * R];
byte lease[R * BLOCKS];             /* epoch that holds the block, 0: free */

/* What has happened, for the assertions only, one bit per epoch. */
byte finished[R], released[R];
byte issued[R];
bool in_order[R];                   /* the rank has waited for its calls in order so far */

#define RAISE(signal, value) assert(signal <= value); signal = value

#if ORDERED
#define CONSENT(me, p, e) (e <= DEPTH || consumed[PAIR(me, p)] + DEPTH >= e)
#else
#define CONSENT(me, p, e) (e <= DEPTH || done_signal[COPY(me, p, e)] + DEPTH >= e)
#endif
#if MUTATE == 1
#define MAY_SEND(me, p, e) true
#else
#define MAY_SEND(me, p, e) CONSENT(me, p, e)
#endif

/* Why there is one copy more than outstanding calls: a rank need not wait for a peer that is at most one call behind and
   waits for its calls in order. */
#define NO_STALL(me, p, e) assert(!(in_order[p] && issued[p] + 1 >= e) || CONSENT(me, p, e))

inline issue(b) {
  issued[me]++;
  if
  :: b -> my_offer[issued[me]] = b; lease[BLOCK(me, b)] = issued[me]
  :: else
  fi;
  NO_STALL(me, p1, issued[me]);
  NO_STALL(me, p2, issued[me])
}

inline send_header(p, e) {
  ADD(header_sent[p], e);
  assert(header[COPY(p, me, e)] == 0 || HAS(finished[p], header[COPY(p, me, e)]));
  header[COPY(p, me, e)] = e;
  offer[COPY(p, me, e)] = my_offer[e];
  RAISE(header_signal[COPY(p, me, e)], e)
}

/* All headers are here: from now on the offers are known. */
inline plan(e) {
  assert(header[COPY(me, p1, e)] == e && header[COPY(me, p2, e)] == e);
  may_write[p1 * (EPOCHS + 1) + e] = offer[COPY(me, p1, e)];
  may_write[p2 * (EPOCHS + 1) + e] = offer[COPY(me, p2, e)]
}

inline write_rows(p, e) {
  b = may_write[p * (EPOCHS + 1) + e];
  may_write[p * (EPOCHS + 1) + e] = 0;
  if
  :: b == 0 ->
     assert(staging[COPY(p, me, e)] == 0 || HAS(finished[p], staging[COPY(p, me, e)]));
     staging[COPY(p, me, e)] = e
  :: else ->
     assert(lease[BLOCK(p, b)] == e);
     assert(block[PART(p, b, me)] == 0 || HAS(released[p], block[PART(p, b, me)]));
     block[PART(p, b, me)] = e
  fi;
  b = 0
}

inline check_rows(e) {
  if
  :: my_offer[e] == 0 -> assert(staging[COPY(me, p1, e)] == e && staging[COPY(me, p2, e)] == e)
  :: else -> assert(block[PART(me, my_offer[e], p1)] == e && block[PART(me, my_offer[e], p2)] == e)
  fi
}

inline finish(e) {
  check_rows(e);
  ADD(finished[me], e);
  do
  :: last < EPOCHS && HAS(finished[me], last + 1) -> last++
  :: else -> break
  od;
#if ORDERED
  RAISE(consumed[PAIR(p1, me)], last);
  RAISE(consumed[PAIR(p2, me)], last);
#endif
  RAISE(done_signal[COPY(p1, me, e)], e);
  RAISE(done_signal[COPY(p2, me, e)], e)
}

inline wait(e) {
  ADD(waited, e);
  num_waited++;
  in_order[me] = in_order[me] && num_waited == e;
  if
  :: my_offer[e] == 0 -> ADD(released[me], e)   /* memory of its own */
  :: else
  fi
}

inline release(e) {
  check_rows(e);
  lease[BLOCK(me, my_offer[e])] = 0;
  my_offer[e] = 0;
  ADD(released[me], e)
}

#define ISSUE_MAY (issued[me] < EPOCHS && issued[me] < num_waited + OUT)
#if MUTATE == 3
#define OFFER_MAY(b) (lease[BLOCK(me, b)] == 0 || HAS(waited, lease[BLOCK(me, b)]))
#else
#define OFFER_MAY(b) (lease[BLOCK(me, b)] == 0)
#endif

#define ALL_HEADERS(e) (HAS(header_sent[p1], e) && HAS(header_sent[p2], e) && \
  header_signal[COPY(me, p1, e)] >= e && header_signal[COPY(me, p2, e)] >= e)
#define ALL_ROWS(e) (HAS(rows_sent[p2], e) && rows_signal[COPY(me, p1, e)] >= e && rows_signal[COPY(me, p2, e)] >= e)

/* Headers go to the peers in turn; one whose copy is not free is passed over. */
#define HEADER_STEP(p, e, turn) \
  :: d_step { e <= issued[me] && !HAS(header_sent[p], e) && MAY_SEND(me, p, e) && (turn) -> send_header(p, e) }
/* Rows go to one peer after the other, `before` says when. */
#if MUTATE == 4
#define ROWS_STEP(p, e, before, prepare) \
  :: d_step { before && !HAS(rows_raised[p], e) -> prepare; ADD(rows_raised[p], e); RAISE(rows_signal[COPY(p, me, e)], e) } \
  :: d_step { HAS(rows_raised[p], e) && !HAS(rows_sent[p], e) -> ADD(rows_sent[p], e); write_rows(p, e) }
#else
#define ROWS_STEP(p, e, before, prepare) \
  :: d_step { before && !HAS(rows_sent[p], e) -> \
     prepare; ADD(rows_sent[p], e); write_rows(p, e); RAISE(rows_signal[COPY(p, me, e)], e) }
#endif
#define CALL_STEPS(e) \
  HEADER_STEP(p1, e, true) HEADER_STEP(p2, e, HAS(header_sent[p1], e) || !MAY_SEND(me, p1, e)) \
  ROWS_STEP(p1, e, ALL_HEADERS(e), plan(e)) ROWS_STEP(p2, e, HAS(rows_sent[p1], e), skip) \
  :: d_step { ALL_ROWS(e) && !HAS(finished[me], e) -> finish(e) } \
  :: d_step { HAS(finished[me], e) && !HAS(waited, e) && (FREE(me) || num_waited + 1 == e) -> wait(e); \
     if \
     :: !KEEPS(me) && my_offer[e] -> release(e) \
     :: else \
     fi } \
  :: d_step { KEEPS(me) && HAS(waited, e) && my_offer[e] -> release(e) }

/* Whatever a rank does, it moves all of its outstanding calls (Lane::drive). The lowest free block is offered. */
proctype Rank(byte me, p1, p2) {
  byte my_offer[EPOCHS + 1], may_write[R * (EPOCHS + 1)];
  byte header_sent[R], rows_sent[R];
#if MUTATE == 4
  byte rows_raised[R];
#endif
  byte waited, num_waited, last, b;
  do
  :: d_step { ISSUE_MAY && (OWN_MEMORY(me) || (!OFFER_MAY(1) && !OFFER_MAY(2))) -> issue(0) }
  :: d_step { ISSUE_MAY && !OWN_MEMORY(me) && OFFER_MAY(1) -> issue(1) }
  :: d_step { ISSUE_MAY && !OWN_MEMORY(me) && !OFFER_MAY(1) && OFFER_MAY(2) -> issue(2) }
  CALL_STEPS(1)
  CALL_STEPS(2)
  CALL_STEPS(3)
  CALL_STEPS(4)
  :: released[me] == (1 << (EPOCHS + 1)) - 2 -> break
  od
}

init {
  atomic {
    in_order[0] = true; in_order[1] = true; in_order[2] = true;
    run Rank(0, 1, 2); run Rank(1, 2, 0); run Rank(2, 0, 1)
  }
}
