/* How ranks meet (docs/design/bootstrap.md): by default the collective steps over a store, with -DJOIN=1 the door of the store that rank 0
   serves.

   STEPS. Each rank publishes a key per step, reads those of all others, then erases its own of the step before. A rank whose time is over
   writes notes under its own key and under those of who is missing. Rank 0 serves the store, and hands out what it holds when it leaves.
   CASE 0: all live and nobody's time is over. 1: the last rank dies somewhere, and the time of one other alone is over, which
   waits for it. 2: all live, some
   are late: the time of any may be over at any moment.

   -DMUTATE=  1 a key is erased before all have published the next        2 a note under its own key alone
              3 rank 0 leaves without handing out what the store holds
   JOIN: hello, challenge, proof, member. Rank 1 joins, rank 2 dies on its way in and is started again, a stranger repeats what it has heard.
              4 a place is taken by hello, not by proof   5 proofs do not hold the nonce of the door   6 a place is not free again */
#ifndef MUTATE
#define MUTATE 0
#endif
#ifndef JOIN
#define JOIN 0
#endif
#ifndef CASE
#define CASE 0
#endif

#if !JOIN
#define N 3
#define LAST 2
#define ABSENT 0
#define ARRIVED 1
#define NOTE 2
#define KEY(step, r) (((step) - 1) * N + (r))

byte value[LAST * N];
bool closed;               /* rank 0 has left: what it held is with everybody, and nothing is added */
byte published[N], finished[N];   /* the last step that it began, and that came about there */
bool failed[N], dead[N];
byte impatient = N;        /* CASE 1: whose time may be over */

#define OVER(r) (CASE == 2 || (CASE == 1 && impatient == (r) && dead[N - 1] && peer == N - 1))
#define THERE(key) (value[key] != ABSENT && !(MUTATE == 3 && closed))

inline publish(key, what) {
  if
  :: closed -> skip
  :: else -> value[key] = what
  fi
}

proctype Rank(byte me) {
  byte step = 1, peer, missing, seen;
  do
  :: step > LAST || failed[me] || dead[me] -> break
  :: else ->
     d_step { publish(KEY(step, me), ARRIVED); published[me] = step };
     if
     :: d_step { MUTATE == 1 && step > 1 && !closed -> value[KEY(step - 1, me)] = ABSENT }
     :: else
     fi;
     peer = 0; missing = 0; seen = 1 << me;
     /* In the order of ranks; once somebody is missing the others have no more time. */
     do
     :: peer == N || failed[me] || dead[me] -> break
     :: peer == me -> peer++
     :: d_step { CASE == 1 && me == N - 1 && !dead[me] -> dead[me] = true }
     :: peer < N && peer != me && !failed[me] && !dead[me] ->
end:    if
        :: d_step { THERE(KEY(step, peer)) ->
           if
           :: value[KEY(step, peer)] == NOTE -> failed[me] = true
           :: else -> seen = seen | (1 << peer); peer++
           fi }
        :: d_step { !THERE(KEY(step, peer)) && closed -> failed[me] = true }
        :: d_step { !THERE(KEY(step, peer)) && !closed && (missing || OVER(me)) -> missing = missing | (1 << peer); peer++ }
        :: d_step { CASE == 1 && me == N - 1 -> dead[me] = true }
        fi
     od;
     if
     :: missing && !failed[me] && !dead[me] ->
        /* One message after the other: who is late may come in between. */
        publish(KEY(step, me), NOTE);
        peer = 0;
        do
        :: peer == N -> break
        :: d_step { peer < N -> 
           if
           :: ((missing >> peer) & 1) && MUTATE != 2 -> publish(KEY(step, peer), NOTE)
           :: else
           fi;
           peer++ }
        od;
        failed[me] = true
     :: d_step { !missing && !failed[me] && !dead[me] ->
        assert(published[0] >= step && published[1] >= step && published[2] >= step);
        finished[me] = step;
        if
        :: step > 1 && !closed -> value[KEY(step - 1, me)] = ABSENT
        :: else
        fi;
        step++ }
     :: (failed[me] || dead[me]) -> skip
     fi
  od;
  /* Who fails may keep its store for a while, or for good. */
  if
  :: me == 0 -> closed = true
  :: me != 0 || failed[me] -> skip
  fi
}

#define ENDED(r) (finished[r] == LAST || failed[r] || dead[r])
proctype Monitor() {
  timeout ->
  assert(ENDED(0) && ENDED(1) && ENDED(2));                                                       /* nobody hangs */
  assert(CASE != 0 || (finished[0] == LAST && finished[1] == LAST && finished[2] == LAST));       /* nobody fails without a reason */
  assert(!dead[2] || finished[2] == LAST || (finished[0] <= finished[2] + 1 && finished[1] <= finished[2] + 1))
}

init {
  atomic {
    if
    :: CASE != 1
    :: CASE == 1 -> impatient = 0
    :: CASE == 1 -> impatient = 1
    fi;
    run Rank(0); run Rank(1); run Rank(2); run Monitor()
  }
}

#else  /* JOIN */

/* Connections: rank 1, rank 2, rank 2 started again, and two of a stranger. Nonces: the door has another one for each connection and each try. A
   proof is made of rank, both nonces and the secret; the stranger has no secret, but has heard rank 1. */
#define C 5
#define HELLO 1
#define CHALLENGED 2
#define MEMBER 3
#define REFUSED 4
#define CLOSED 5
#define STRANGER(c) ((c) >= 3)
#define PLACE(c) ((c) == 1 || (c) == 2 -> 4 : 2)
#define MOST_UNPROVEN 3

byte state[C], door_nonce[C], proof_for[C];   /* proof_for: the door's nonce that its proof is made of; 0: none has come */
byte heard;                                   /* by the stranger: the proof of rank 1 for this nonce */
byte joined = 1, unproven;                    /* joined: who has a place, rank 0 among them */
bool open = true, ended[C];                   /* ended: the other end has gone */

#define UNPROVEN(c) (state[c] == HELLO || state[c] == CHALLENGED)

inline drop(c) {
  if
  :: UNPROVEN(c) -> unproven--
  :: else
  fi;
  if
  :: MUTATE != 6 && (state[c] == MEMBER || (MUTATE == 4 && state[c] == CHALLENGED)) -> joined = joined & ~PLACE(c)
  :: else
  fi;
  state[c] = CLOSED;
  proof_for[c] = 0
}

inline admit(c) {
  unproven--;
  if
  :: MUTATE != 5 && proof_for[c] != door_nonce[c] -> state[c] = REFUSED
  :: (MUTATE == 5 || proof_for[c] == door_nonce[c]) && MUTATE != 4 && (joined & PLACE(c)) -> state[c] = REFUSED
  :: else -> joined = joined | PLACE(c); state[c] = MEMBER
  fi;
  if
  :: joined == 7 && (MUTATE != 4 || (state[0] == MEMBER && (state[1] == MEMBER || state[2] == MEMBER))) ->
     open = false;               /* nobody else has business here */
     for (other : 0 .. C - 1) {
       if
       :: UNPROVEN(other) -> drop(other)
       :: else
       fi
     };
     other = 0
  :: else
  fi
}

#define ON_HELLO(c) \
  :: d_step { state[c] == HELLO && !ended[c] -> \
     door_nonce[c] = (door_nonce[c] == 2 * c + 1 -> 2 * c + 2 : 2 * c + 1); \
     if \
     :: MUTATE == 4 && (joined & PLACE(c)) -> state[c] = REFUSED; unproven-- \
     :: else -> state[c] = CHALLENGED; joined = joined | (MUTATE == 4 -> PLACE(c) : 0) \
     fi }
#define ON_PROOF(c) :: d_step { state[c] == CHALLENGED && proof_for[c] && !ended[c] -> admit(c) }
#define ON_END(c) :: d_step { ended[c] && state[c] && state[c] != CLOSED -> drop(c) }
#define ON_DEADLINE(c) :: d_step { UNPROVEN(c) -> drop(c) }

/* One loop. A stranger has little time; ranks are quicker. */
proctype Door() {
  byte other;
end: do
  ON_HELLO(0) ON_HELLO(1) ON_HELLO(2) ON_HELLO(3) ON_HELLO(4)
  ON_PROOF(0) ON_PROOF(1) ON_PROOF(2) ON_PROOF(3) ON_PROOF(4)
  ON_END(1) ON_END(2) ON_END(3) ON_END(4)
  ON_DEADLINE(3) ON_DEADLINE(4)
  od
}

/* Too many that have proven nothing: one goes. */
inline connect(c) {
  atomic {
    if
    :: open && unproven == MOST_UNPROVEN ->
       if
       :: UNPROVEN(0) -> drop(0)
       :: UNPROVEN(1) -> drop(1)
       :: UNPROVEN(2) -> drop(2)
       :: UNPROVEN(3) -> drop(3)
       :: UNPROVEN(4) -> drop(4)
       fi
    :: else
    fi;
    if
    :: open -> state[c] = HELLO; unproven++
    :: else -> state[c] = CLOSED
    fi
  }
}

/* A rank. It tries again while the door is open. The first process of rank 2 may end anywhere; the second is started once that is known,
   because its end came before. */
proctype Client(byte c) {
  if
  :: c != 2
  :: c == 2 ->
end_start: ended[1] && (state[1] == CLOSED || state[1] == 0)
  fi;
again:
  connect(c);
end_wait: do
  :: d_step { state[c] == CHALLENGED && !proof_for[c] ->
     proof_for[c] = door_nonce[c];
     if
     :: c == 0 -> heard = door_nonce[c]
     :: else
     fi }
  :: state[c] == CLOSED && open && !ended[c] -> goto again
  :: state[c] == REFUSED -> assert(false)              /* nobody who belongs here is refused */
  :: d_step { c == 1 && open && !ended[1] -> ended[1] = true }; break     /* later its job has it, and its end is a rank's that dies */
  od
}

proctype Stranger(byte c) {
  connect(c);
end_wait: do
  :: d_step { state[c] == CHALLENGED && !proof_for[c] && heard -> proof_for[c] = heard }
  :: d_step { UNPROVEN(c) && !ended[c] -> ended[c] = true }
  od
}

proctype Monitor() {
  timeout ->
  assert(!open && state[0] == MEMBER && state[3] != MEMBER && state[4] != MEMBER);
  /* One that ends while the last of the others comes in has been counted: then the first step of the job misses it. */
  assert(joined == 7 || (ended[1] && state[2] == CLOSED))
}

init {
  atomic { run Door(); run Client(0); run Client(1); run Client(2); run Stranger(3); run Stranger(4); run Monitor() }
}
#endif
