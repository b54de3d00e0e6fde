use super::*;

/// Replies, each with one rank it is for.
type Replies = Vec<(u32, Reply)>;

fn one_by_one(out: Outbox) -> Replies {
    let each = |letter: Letter| -> Replies {
        letter.to.iter().enumerate().map(|(place, to)| (*to, letter.reply.for_some(&[place]))).collect()
    };
    out.into_iter().flat_map(each).collect()
}

fn all(id: u64, values: &[&[u8]]) -> Reply {
    let table = Table::of(values.iter().copied());
    Reply::All { ids: vec![id], summary: table.summary(), table: Some(table) }
}

struct Bench {
    namespace: Namespace,
    now: Instant,
}

impl Bench {
    fn of(size: u32) -> Bench {
        let mut namespace = Namespace::new(Role::Rank, Some(size), None);
        for rank in 0..size {
            namespace.join(rank, size, "", &mut Vec::new()).unwrap();
        }
        Bench { namespace, now: Instant::now() }
    }

    fn ask(&mut self, rank: u32, request: Request) -> Replies {
        let mut out = Vec::new();
        self.namespace.handle(rank, request, self.now, &mut out);
        one_by_one(out)
    }

    fn exchange(&mut self, rank: u32, value: &[u8], wait: u64) -> Replies {
        self.ask(rank, Request::Exchange { id: rank.into(), key: "k".into(), value: value.into(), wait })
    }

    fn after(&mut self, ms: u64) -> Replies {
        self.now += Duration::from_millis(ms);
        let mut out = Vec::new();
        self.namespace.expire(self.now, &mut out);
        one_by_one(out)
    }
}

#[test]
fn an_exchange_answers_all_at_once_in_rank_order_and_can_be_repeated() {
    let mut bench = Bench::of(3);
    for _ in 0..2 {
        assert_eq!(bench.exchange(2, b"c", 10), []);
        assert_eq!(bench.exchange(0, b"a", 10), []);
        let all = |rank: u32| (rank, all(rank.into(), &[b"a", b"b", b"c"]));
        assert_eq!(bench.exchange(1, b"b", 10), [all(2), all(0), all(1)]);
    }
    assert_eq!(bench.namespace.stored, 0);
    assert_eq!(bench.namespace.next_deadline(), None);
}

#[test]
fn what_a_member_tells_goes_to_those_it_names() {
    let mut bench = Bench::of(3);
    let told = |rank: u32| (rank, Reply::Message { from: 1, value: b"v".into() });
    let tell = |to: &[u32]| Request::Send { to: to.into(), value: b"v".into() };
    assert_eq!(bench.ask(1, tell(&[2, 1])), [told(2), told(1)]);
    assert_eq!(bench.ask(1, tell(&[])), [told(0), told(1), told(2)]);
    bench.namespace.ended(2, End::Left, &mut Vec::new());
    assert_eq!(bench.ask(1, tell(&[2, 0])), [told(0)]);
    assert_eq!(bench.namespace.stored, 0);
}

#[test]
fn a_late_rank_gets_the_verdict_of_the_others() {
    let mut bench = Bench::of(3);
    bench.exchange(0, b"", 1000);
    bench.exchange(2, b"", 2000);
    assert_eq!(bench.after(999), []);
    let timed_out = |rank: u32| (rank, Reply::TimedOut { id: rank.into(), missing: vec![1] });
    assert_eq!(bench.after(1), [timed_out(0), timed_out(2)]);
    assert_eq!(bench.exchange(1, b"", 1000), [timed_out(1)]);
    // All have the answer: the next one is a new one.
    assert_eq!(bench.exchange(1, b"", 1000), []);
}

#[test]
fn a_rank_that_ends_fails_what_it_owes_and_nothing_else() {
    let mut bench = Bench::of(3);
    bench.exchange(0, b"", 1000);
    bench.exchange(1, b"", 1000);
    let mut out = Vec::new();
    bench.namespace.ended(1, End::Closed, &mut out);
    // It had given its value: the exchange goes on without its attention.
    let lost = |to: u32, rank: u32| (to, Reply::Lost { rank, end: End::Closed });
    assert_eq!(one_by_one(out), [lost(0, 1), lost(1, 1), lost(2, 1)]);
    let all = |rank: u32| (rank, all(rank.into(), &[&[][..]; 3]));
    assert_eq!(bench.exchange(2, b"", 1000), [all(0), all(2)]);
    // The next one needs it.
    let gone = |rank: u32| (rank, Reply::Gone { id: rank.into(), rank: 1, end: End::Closed });
    assert_eq!(bench.exchange(0, b"", 1000), [gone(0)]);
    assert_eq!(bench.namespace.lost().collect::<Vec<_>>(), [(1, End::Closed)]);
}

/// A member of a communicator that grows ends after it has given its value: the last place is given to nobody, and nobody waits.
#[test]
fn a_group_that_can_never_be_complete_gives_up() {
    let mut namespace = Namespace::new(Role::Rank, Some(3), None);
    for rank in 0..2 {
        namespace.join(rank, 3, "", &mut Vec::new()).unwrap();
    }
    let mut bench = Bench { namespace, now: Instant::now() };
    bench.exchange(0, b"", 1000);
    bench.exchange(1, b"", 1000);
    assert_eq!(bench.namespace.free_place(2), Some(2));
    let mut out = Vec::new();
    bench.namespace.ended(1, End::Closed, &mut out);
    assert_eq!(bench.namespace.free_place(2), None);
    bench.namespace.give_up(1, End::Closed, &mut out);
    let gone = (0, Reply::Gone { id: 0, rank: 1, end: End::Closed });
    assert!(one_by_one(out).contains(&gone));
}

#[test]
fn leaving_is_no_loss_but_ends_waiting() {
    let mut bench = Bench::of(2);
    bench.exchange(0, b"", 1000);
    let mut out = Vec::new();
    bench.namespace.ended(1, End::Left, &mut out);
    assert_eq!(one_by_one(out), [(0, Reply::Gone { id: 0, rank: 1, end: End::Left })]);
    assert_eq!(bench.namespace.lost().count(), 0);
}

#[test]
fn values_wait_for_their_readers_and_readers_for_values() {
    let mut bench = Bench::of(2);
    let get = |id| Request::Get { id, key: "k".into(), wait: 50 };
    let set = |value: &[u8], keep| Request::Set { id: 9, key: "k".into(), value: value.into(), keep };
    let value = |id, value: &[u8]| Reply::Value { id, value: value.into() };
    assert_eq!(bench.ask(1, get(1)), []);
    assert_eq!(bench.after(50), [(1, Reply::TimedOut { id: 1, missing: vec![] })]);
    bench.ask(1, get(2));
    assert_eq!(bench.ask(0, set(b"x", true)), [(1, value(2, b"x")), (0, value(9, b"x"))]);
    assert_eq!(bench.ask(0, set(b"y", true)), [(0, value(9, b"x"))]);
    assert_eq!(bench.ask(0, set(b"y", false)), [(0, value(9, b"y"))]);
    assert_eq!(bench.ask(1, get(3)), [(1, value(3, b"y"))]);
}

#[test]
fn counters_count_and_overflow_is_refused() {
    let mut bench = Bench::of(1);
    let add = |amount| Request::Add { id: 1, key: "n".into(), amount };
    assert_eq!(bench.ask(0, add(3)), [(0, Reply::Sum { id: 1, value: 3 })]);
    assert_eq!(bench.ask(0, add(-5)), [(0, Reply::Sum { id: 1, value: -2 })]);
    assert!(matches!(bench.ask(0, add(i64::MIN))[..], [(0, Reply::Refused { .. })]));
    bench.ask(0, Request::Set { id: 2, key: "n".into(), value: b"word".into(), keep: false });
    assert!(matches!(bench.ask(0, add(1))[..], [(0, Reply::Refused { .. })]));
}

#[test]
fn memory_is_bounded() {
    let mut bench = Bench::of(1);
    let mut refused = None;
    for n in 0..2000 {
        let set = Request::Set { id: n, key: n.to_string(), value: vec![0; 64 << 10], keep: false };
        if let [(_, Reply::Refused { reason, .. })] = &bench.ask(0, set)[..] {
            refused = Some((n, reason.clone()));
            break;
        }
    }
    let (n, reason) = refused.expect("a limit");
    assert!((1000..1030).contains(&n), "{n}");
    assert!(reason.contains("64 MiB"), "{reason}");
    // Replacing what is there takes no more.
    let set = Request::Set { id: 1, key: "1".into(), value: vec![1; 10], keep: false };
    assert!(matches!(bench.ask(0, set)[..], [(0, Reply::Value { .. })]));
}

#[test]
fn those_who_cannot_be_right_are_refused_and_nobody_waits_for_them() {
    let mut namespace = Namespace::new(Role::Rank, None, None);
    let mut out = Vec::new();
    namespace.join(0, 3, "", &mut out).unwrap();
    let now = Instant::now();
    namespace.handle(0, Request::Exchange { id: 5, key: "k".into(), value: vec![], wait: 9 }, now, &mut out);
    assert_eq!(out, []);
    let reason = namespace.join(1, 4, "", &mut out).unwrap_err();
    assert!(reason.contains("4 ranks") && reason.contains("expects 3"), "{reason}");
    assert_eq!(out, [Letter::to(0, Reply::Refused { id: 0, reason })]);

    let mut bench = Bench::of(2);
    for (rank, size, says) in [(1, 2, "two processes claim to be rank 1"), (2, 2, "no rank 2")] {
        let reason = bench.namespace.join(rank, size, "", &mut out).unwrap_err();
        assert!(reason.contains(says), "{reason}");
    }
    // Those who were complete go on.
    assert_eq!(bench.exchange(0, b"", 5), []);
}
