/* Change of membership by generation (docs/design/membership.md): suspicion, proposals, commit, relay, fencing, admission. One call is under
   way. Ranks 0 and 1 live. Rank 2 has died among its headers: any of the others may have one. Rank 3 may die, or be suspected although it
   goes on (stopped, and woken at any moment): a zombie.

   A record is written into the memory of one rank after the other, so who dies may have told some; those who live tell all at once, because
   each reader looks when it likes. Headers that decide nothing are there from the start. What a rank counts with in its call is its table:
   the sources whose rows it gives places.

   -DBLOCK=1 looks at what comes after instead: rank 2 is removed already, and what a zombie may still write must harm nobody.
   -DMUTATE=  1 a rank that has proposed still plans             2 one proposal is enough for a commit
              3 a commit of a rank that is being removed is taken   4 who commits looks at its own plan alone
              5 a block is used again before a zombie is fenced  6 a rank is admitted before its predecessor is fenced
              7 only the ranks of the last change count as sending nothing, not those of the one before */
#ifndef MUTATE
#define MUTATE 0
#endif
#ifndef BLOCK
#define BLOCK 0
#endif
#define R 4
#define ALL 15
#define BIT(r) (1 << (r))
#define IN(r, set) (((set) >> (r)) & 1)
#define AT(base, to, from) (((base) * R + (to)) * R + (from))
#define SET(record) ((record) & 15)
#define PLANNED 16

/* Memory of rank `to`, written by rank `from`, by the generation it starts from. 0: nothing there. */
byte proposal[2 * R * R];     /* set to remove, and PLANNED */
byte commit[2 * R * R];       /* set to remove, and PLANNED: the counts were complete on some survivor */
byte header[R];               /* sources whose header is here, their own or relayed */

byte generation[R], members[R], removing[R];   /* removing: what this rank proposes; not 0: frozen */
byte sources[R], table[R];                     /* who counts in the call: before, and as planned */
bool planned[R], direct[R], no_direct[R], masked[R], dead[R];
bool wrote;                   /* rank 3, its rows into the block of rank 0 */
byte block = 1;               /* of rank 0, offered to rank 3: the call that may write it; 0: retired */
bool admitted;                /* the successor of rank 3 */

#define FENCED(r) (dead[r] || masked[r])
#define GONE_FENCED(at) ((IN(2, members[at]) || FENCED(2)) && (IN(3, members[at]) || FENCED(3)))
#define BASE (generation[me])
#define FROZEN (removing[me] != 0)
/* A rank that is no member, or that this one removes, is not listened to. */
#define HEARD(p) (p != me && IN(p, members[me]) && !IN(p, removing[me]))
#define NEWS(p) (HEARD(p) && BASE < 2 && (SET(proposal[AT(BASE, me, p)]) & ~removing[me]))
#if MUTATE == 2
#define AGREES(p) (HEARD(p) && SET(proposal[AT(BASE, me, p)]) == removing[me])
#define AGREED (AGREES(0) || AGREES(1) || AGREES(2) || AGREES(3) || removing[me] == (members[me] & ~BIT(me)))
#else
#define AGREES(p) (!HEARD(p) || SET(proposal[AT(BASE, me, p)]) == removing[me])
#define AGREED (AGREES(0) && AGREES(1) && AGREES(2) && AGREES(3))
#endif
#if MUTATE == 3
#define COMMIT_OF(p) (p != me && IN(p, members[me]) && BASE < 2 && commit[AT(BASE, me, p)])
#else
#define COMMIT_OF(p) (HEARD(p) && BASE < 2 && commit[AT(BASE, me, p)])
#endif
#define HAS_PLANNED(p) (HEARD(p) && (proposal[AT(BASE, me, p)] & PLANNED))
#if MUTATE == 4
#define DECIDED (planned[me])
#else
#define DECIDED (planned[me] || HAS_PLANNED(0) || HAS_PLANNED(1) || HAS_PLANNED(2) || HAS_PLANNED(3))
#endif

inline propose(more) {
  removing[me] = removing[me] | (more);
  to_propose = members[me] & ~removing[me] & ~BIT(me);
  what = removing[me] | (planned[me] -> PLANNED : 0)
}

/* Takes a commit, its own or another's. Who has planned tells the headers to those who have not: here all who have, in the protocol the
   lowest. */
inline adopt(set, decided) {
  if
  :: IN(me, set) -> masked[me] = true
  :: else ->
     members[me] = members[me] & ~(set);
     if
     :: planned[me] || (decided) -> skip
#if MUTATE == 7
     :: else -> sources[me] = sources[me] & ~(set); no_direct[me] = true
#else
     :: else -> sources[me] = members[me]; no_direct[me] = true
#endif
     fi;
     committed = (set) | ((decided) -> PLANNED : 0);
     committed_base = generation[me];
     to_commit = members[me] & ~BIT(me);
     to_relay = (planned[me] -> to_commit : 0);
     for (p : 0 .. R - 1) { proposal[AT(BASE, me, p)] = 0; commit[AT(BASE, me, p)] = 0 };
     p = 0;
     generation[me]++;
     removing[me] = 0;
     to_propose = 0;
     what = 0
  fi
}

#define NEXT(set, p) (IN(p, set) && ((set) & (BIT(p) - 1)) == 0)
#define SEND_HEADER(p) :: d_step { NEXT(to_header, p) -> TOUCH; header[p] = header[p] | BIT(me); to_header = to_header & ~BIT(p) }
/* To the next of a set, or to all. */
#define TELL(set, one) \
  :: d_step { set -> TOUCH; p = 0; \
     do \
     :: p < R && !IN(p, set) -> p++ \
     :: p < R && IN(p, set) -> one; set = set & ~BIT(p); /* nobody looks at what is of a generation that it has left */ \
        if \
        :: me < 2 -> p++ \
        :: else -> break \
        fi \
     :: p == R -> break \
     od; p = 0 }
#define READ(p) \
  :: d_step { NEWS(p) -> \
     if \
     :: IN(me, SET(proposal[AT(BASE, me, p)])) -> masked[me] = true \
     :: else -> propose(SET(proposal[AT(BASE, me, p)])) \
     fi } \
  :: d_step { COMMIT_OF(p) -> adopt(SET(commit[AT(BASE, me, p)]), commit[AT(BASE, me, p)] & PLANNED) }
/* The old rank 3 writes nothing more once a new one is there. */
#define TOUCH assert(me != 3 || !admitted)
#define CAN_PLAN (!planned[me] && ((header[me] | BIT(me)) & sources[me]) == sources[me] && (MUTATE == 1 || !FROZEN))

proctype Rank(byte me) {
  byte to_header = (me == 3 -> 3 : 0), to_propose, to_commit, to_relay, what, committed, committed_base, p;
  do
  :: dead[me] || masked[me] -> break
  :: else ->
end: if
     :: d_step { me == 3 && !masked[me] -> dead[me] = true }
     SEND_HEADER(0) SEND_HEADER(1)
     :: d_step { CAN_PLAN -> planned[me] = true; table[me] = sources[me]; direct[me] = !no_direct[me] }
     :: d_step { BLOCK && me == 3 && planned[me] && direct[me] && !wrote -> TOUCH; assert(block <= 1); wrote = true }
     :: d_step { BASE < 2 && IN(2, members[me]) && !IN(2, removing[me]) -> propose(BIT(2)) }
     :: d_step { BASE < 2 && me < 2 && IN(3, members[me]) && !IN(3, removing[me]) -> propose(BIT(3)) }
     TELL(to_propose, if :: generation[p] == BASE -> proposal[AT(BASE, p, me)] = what :: else fi)
     READ(0) READ(1) READ(2) READ(3)
     :: d_step { FROZEN && BASE < 2 && to_propose == 0 && AGREED -> adopt(removing[me], DECIDED) }
     TELL(to_commit, if :: generation[p] == committed_base -> commit[AT(committed_base, p, me)] = committed :: else fi)
     TELL(to_relay, header[p] = header[p] | table[me])
     fi
  od
}

/* Rank 0's block: used by the next call once all who may write it have done so or are fenced. */
#define CALL_ENDED (planned[0] && planned[1] && removing[0] == 0 && removing[1] == 0 && generation[0] == generation[1])
proctype Owner() {
end_call: d_step { CALL_ENDED && (!direct[0] || !IN(3, members[0]) || wrote) ->
    if
    :: MUTATE == 5 || GONE_FENCED(0) -> block = 2
    :: else -> block = 0
    fi };
end_after: do
  :: d_step { block == 0 && GONE_FENCED(0) -> block = 2 }
  :: d_step { !admitted && !IN(3, members[0]) && !IN(3, members[1]) && (MUTATE == 6 || GONE_FENCED(0)) -> admitted = true }
  od
}

#define SAME_TABLE(p, q) (!(planned[p] && planned[q]) || table[p] == table[q])
#define SAME_PLACES(p, q) (!(planned[p] && planned[q] && direct[p] && direct[q]) || table[p] == table[q])
/* Ranks of one generation that live have one list of members. */
#define SAME_MEMBERS(p, q) (generation[p] != generation[q] || members[p] == members[q] || !IN(p, members[q]) || !IN(q, members[p]))
proctype Monitor() {
  timeout ->
  assert(planned[0] && planned[1]);                                   /* nobody hangs */
  assert(members[0] == members[1] && generation[0] == generation[1]);
  assert(SAME_TABLE(0, 1));
  assert(SAME_PLACES(0, 3) && SAME_PLACES(1, 3))
}

init {
  d_step {
    byte i;
    for (i : 0 .. R - 1) {
      members[i] = ALL & ~(BLOCK -> BIT(2) : 0);
      sources[i] = members[i];
      generation[i] = BLOCK;
      header[i] = (i == 3 -> ALL : 3)
    };
    dead[2] = true;
    i = 0
  };
  if
  :: header[0] = 7; header[1] = 7
  :: header[0] = 7
  :: skip
  fi;
  atomic {
    run Rank(0); run Rank(1); run Rank(3); run Monitor();
    if
    :: BLOCK -> run Owner()
    :: else
    fi
  }
}
