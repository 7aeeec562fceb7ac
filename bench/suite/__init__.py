"""The suite: many cases, our system and its rivals, in alternating rounds. Called by `logyard bench run | compare`."""
