use super::*;
use proptest::prelude::*;

fn request() -> impl Strategy<Value = Request> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..2000);
    let key = || "[a-z/]{0,100}";
    let role = prop_oneof![Just(Role::Rank), Just(Role::Node)];
    prop_oneof![
        (role, any::<u32>(), any::<u32>(), any::<u32>(), key())
            .prop_map(|(role, rank, size, epoch, job)| Request::Join { role, rank, size, epoch, job }),
        (any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), key()).prop_map(
            |(number, members, size, rank, epoch, job)| {
                Request::Grow { growth: Growth { number, members, size }, rank, epoch, job }
            }
        ),
        (any::<u32>(), key()).prop_map(|(epoch, job)| Request::Enter { epoch, job }),
        (any::<u64>(), key(), bytes(), any::<bool>()).prop_map(|(id, key, value, keep)| Request::Set {
            id,
            key,
            value,
            keep
        }),
        (any::<u64>(), key(), any::<u64>()).prop_map(|(id, key, wait)| Request::Get { id, key, wait }),
        (any::<u64>(), key(), any::<i64>()).prop_map(|(id, key, amount)| Request::Add { id, key, amount }),
        (any::<u64>(), key(), bytes(), any::<u64>()).prop_map(|(id, key, value, wait)| Request::Exchange {
            id,
            key,
            value,
            wait
        }),
        (proptest::collection::vec(any::<u32>(), 0..20), bytes())
            .prop_map(|(to, value)| Request::Send { to, value }),
        Just(Request::Heartbeat),
        Just(Request::Deaf),
        Just(Request::Goodbye),
        (any::<u32>(), key()).prop_map(|(epoch, job)| Request::Carry { epoch, job }),
        any::<u32>().prop_map(|ms| Request::Ended { end: End::Silent(ms) }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..200);
    let end = || {
        prop_oneof![
            Just(End::Left),
            Just(End::Closed),
            any::<u32>().prop_map(End::Silent),
            Just(End::Deaf),
            Just(End::Broken)
        ]
    };
    prop_oneof![
        (any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(rank, size, silence)| {
            Reply::Welcome { rank, size, silence, thread: crate::os::ThreadMark::own() }
        }),
        Just(Reply::NoPlace),
        (any::<u64>(), ".{0,50}").prop_map(|(id, reason)| Reply::Refused { id, reason }),
        (any::<u64>(), bytes()).prop_map(|(id, value)| Reply::Value { id, value }),
        (any::<u64>(), any::<i64>()).prop_map(|(id, value)| Reply::Sum { id, value }),
        (proptest::collection::vec(any::<u64>(), 0..20), bytes()).prop_map(|(ids, value)| {
            Reply::All { ids, summary: Table::of([&value[..]].into_iter()).summary(), table: None }
        }),
        (any::<u64>(), proptest::collection::vec(any::<u32>(), 0..20))
            .prop_map(|(id, missing)| Reply::TimedOut { id, missing }),
        (any::<u64>(), any::<u32>(), end()).prop_map(|(id, rank, end)| Reply::Gone { id, rank, end }),
        (any::<u32>(), bytes()).prop_map(|(from, value)| Reply::Message { from, value }),
        (any::<u32>(), end()).prop_map(|(rank, end)| Reply::Lost { rank, end }),
        Just(Reply::Heartbeat),
        Just(Reply::Goodbye),
    ]
}

proptest! {
    #[test]
    fn requests_survive_the_wire(request in request()) {
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn replies_survive_the_wire(reply in reply()) {
        prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn carried_messages_survive_the_wire(
        ranks in proptest::collection::vec(any::<u32>(), 0..20),
        request in request(),
        reply in reply(),
    ) {
        let carried = Carried { ranks: ranks.clone(), message: request };
        prop_assert_eq!(Carried::<Request>::decode(&carried.encode()), Ok(carried));
        let carried = Carried { ranks, message: reply };
        prop_assert_eq!(<Carried<Reply> as Announcing>::decode(&carried.encode()), Ok(carried));
    }

    #[test]
    fn a_part_of_a_message_is_no_message(request in request(), cut in any::<prop::sample::Index>()) {
        let bytes = request.encode();
        prop_assert!(Request::decode(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn garbage_is_refused_or_read_but_never_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..300)
    ) {
        let _ = Greeting::decode(&bytes);
        let _ = Reply::decode(&bytes);
        if let Ok(request) = Request::decode(&bytes) {
            prop_assert!(request.encode().len() <= MAX_REQUEST);
        }
    }

    #[test]
    fn greetings_survive_the_wire(nonce in any::<[u8; 32]>(), version in any::<u8>(), encrypted in any::<bool>()) {
        for side in [Side::Client, Side::Server] {
            let greeting = Greeting { side, version, encrypted, nonce };
            prop_assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        }
    }
}

#[test]
fn lengths_that_are_not_there_allocate_nothing() {
    // An exchange whose value claims 2^63 bytes; a reply with 2^40 values.
    let huge = |tag: u8| {
        let mut bytes = vec![tag, 0];
        bytes.extend([0xff; 9]);
        bytes.push(0x01);
        bytes
    };
    assert!(Request::decode(&huge(4)).is_err());
    assert!(Reply::decode(&huge(4)).is_err());
}

#[test]
fn limits_hold() {
    let set = |key: usize, value: usize| {
        let request = Request::Set { id: 1, key: "k".repeat(key), value: vec![0; value], keep: false };
        Request::decode(&request.encode())
    };
    assert!(set(MAX_KEY, MAX_VALUE).is_ok());
    assert_eq!(set(MAX_KEY + 1, 0), Err(Malformed("the key is too long")));
    assert_eq!(set(0, MAX_VALUE + 1), Err(Malformed("the value is too long")));
    assert_eq!(set(0, MAX_REQUEST), Err(Malformed("it is too long")));
    let job = "j".repeat(MAX_JOB);
    let join = Request::Join { role: Role::Rank, rank: u32::MAX, size: u32::MAX, epoch: u32::MAX, job };
    assert!(join.encode().len() <= MAX_JOIN);
}
